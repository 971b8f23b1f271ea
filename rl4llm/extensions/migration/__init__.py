"""Names of other projects: what each is called here, and `rl4llm import`, which converts their commands and files.

`verl` and `original` are the tables of configuration keys, `names` the table of Python names. They answer
unknown keys and names, fill docs/migration.md, and drive `rl4llm import`. TRL's table is in `rl4llm.extensions.trl`.
"""
