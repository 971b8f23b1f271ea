"""Scripts written for TRL: its names, and what each becomes here.

`table` is the table of names, `joint` what several names say together, `arguments` the objects that stand for TRL's configs,
`script` makes configuration keys of what a script gives, `rows` and `rewards` read TRL's datasets and call its
reward functions. docs/migration.md shows the table.
"""
