"""Scripts written for TRL: its names, and what each becomes in rl4llm.

`table` is the table of names, `joint` combines names that belong together, and `arguments` has the classes that replace
TRL's configs. `script` turns a script's arguments into configuration keys; `rows` and `rewards` read TRL's datasets and
call its reward functions. docs/migration.md shows the table.
"""
