"""The one exception for a mistake that a user can mend; the command line prints it without a traceback."""


class UserError(ValueError):
    """What is wrong, where, what was expected, what to do.

    Raised at the boundary (files, tables, settings, arguments) and nowhere else, so that a plain ValueError still means a bug.
    """
