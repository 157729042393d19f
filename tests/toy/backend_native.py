"""Stands on a library that no machine has."""

import library_that_is_not_there  # noqa: F401
