"""The bytes that a whole program moves."""

from noria.compile.programs.hbm_bytes import Traffic
from noria.compile.programs.hlo_text import read_program


def hbm_bytes(hlo_text: str) -> int:
    """Return the bytes read and written in a call, on one device."""
    program = read_program(hlo_text)
    return Traffic(program).of_run(program.entry)
