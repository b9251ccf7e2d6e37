"""The launchers: what each is told, one table of keys and one book of rules for each."""
