"""Names, commands and functions of other projects; docs/migration.md describes them."""
