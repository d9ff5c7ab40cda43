"""The base of all errors about what a user gives: options, files, plans, models, requests."""


class UserError(ValueError):
    """Something that cannot be used: its message says what was expected, what came, and the remedy.

    A check raises it on purpose. A ValueError of any other class is a mistake in the library.
    """
