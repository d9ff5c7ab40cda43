"""The formats of JSON Schema that are regular, as patterns for whole strings."""

_HOUR_MINUTE = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_HOUR_MINUTE})"
_LEAP = r"([0-9][0-9](0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_YEAR = r"([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
"""Years from 0001 on, as many libraries have no year 0."""
_DATE = (
    rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    rf"|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,6}}"
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_ATOM = r"[A-Za-z0-9_+-]+"
_HEX = "[0-9a-fA-F]"
_PATH = r"[A-Za-z0-9._~:@!$&'()*+,;=/-]*"
_REFERENCE = rf"(https?://{_HOST}(:[1-9][0-9]{{0,3}})?)?(/{_PATH})?(\?{_PATH})?"
_POINTER = r"(/([A-Za-z0-9_. -]|~[01])*)*"
PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": r"P([0-9]{1,6}D(T[0-9]{1,6}H)?|T[0-9]{1,6}(H([0-9]{1,6}M)?|M|S)|[0-9]{1,6}[WMY])",
    "email": rf"{_ATOM}(\.{_ATOM}){{0,4}}@{_LABEL}(\.{_LABEL}){{1,4}}",
    "hostname": _HOST,
    "ipv4": rf"({_OCTET}\.){{3}}{_OCTET}",
    "ipv6": rf"({_HEX}{{1,4}}:){{7}}{_HEX}{{1,4}}",
    "uuid": rf"{_HEX}{{8}}-({_HEX}{{4}}-){{3}}{_HEX}{{12}}",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(0|[1-9][0-9]{{0,5}})(#|{_POINTER})",
    "regex": r"\^?(([A-Za-z0-9_ /,:;@#%&=<>!~-]|\.|\\[dws.])[*+?]?)*\$?",
    "uri-reference": _REFERENCE,
    "iri-reference": _REFERENCE,
    "iri": rf"https?://{_HOST}(:[1-9][0-9]{{0,3}})?(/{_PATH})?(\?{_PATH})?",
    "uri": rf"https?://{_HOST}(:[1-9][0-9]{{0,3}})?(/{_PATH})?(\?{_PATH})?",
}
"""Every match is a string of the format. Rare forms of a format have no match."""
FORMATS = {*PATTERNS, "idn-email", "idn-hostname", "uri-template"}
"""The formats that JSON Schema defines; a format with another name has no effect."""
