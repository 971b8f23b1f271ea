"""Names of other projects: what each is called here, and `rl4llm import`, which converts commands and files of verl.

`verl.yaml` is the table of verl's keys, `names` the table of Python names. TRL's table is in `rl4llm_compat.trl`.
"""
