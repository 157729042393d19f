"""A family for tests of the dispatcher: backends that refuse, cannot import or do not exist."""
