"""Small tasks for a shell behind worked examples, as train.jsonl and test.jsonl.

    python configs/recipes/shell/data.py DIRECTORY [PLACE]

"Sort the lines of plum.txt into oak.txt." A task begins with three files, the column `files`. Its hidden test and a solution
are in a directory in Harbor's form, the column `task`: a path below PLACE, to which DIRECTORY is moved afterwards. Words and
names of the 128 held-out tasks occur in no training task.
"""

import json
import random
import sys
from pathlib import Path

WORDS = {
    "train": "apple river stone cloud tiger paper green music table horse bread light ocean lemon chair piano sugar field "
    "north glass smoke honey winter silver garden rabbit candle bridge window yellow marble forest pencil castle",
    "test": "plum valley copper spider orange violin meadow pepper island thunder basket falcon cherry ladder purple rocket",
}
ROOMS, TASKS = {"train": 16, "test": 8}, {"train": 480, "test": 128}
TASK = """version = "1.0"

[agent]
timeout_sec = 30.0

[verifier]
timeout_sec = 30.0

[environment]
workdir = "/work"
"""
TEST = """#!/bin/sh
# Passes if the files are what they should be: none is missing, changed or added.
diff -r /tests/files /work
"""
SYSTEM = "Solve each task with one command."
EXAMPLES = {
    "Write the word dog to the file cat.txt.": "echo dog > cat.txt",
    "Rename the file cat.txt to cow.txt.": "mv cat.txt cow.txt",
    "Sort the lines of the file cow.txt into hen.txt.": "sort cow.txt > hen.txt",
    "Write the first 5 lines of the file hen.txt to fox.txt.": "head -n 5 hen.txt > fox.txt",
    "Write the lines of the file fox.txt that contain owl to elk.txt.": "grep owl fox.txt > elk.txt",
    "Replace dog by pig in the file elk.txt.": "sed -i s/dog/pig/g elk.txt",
}
# What is asked, the command that does it, and how it changes the files, a mapping from names to lines.
KINDS = {
    "write": (
        "Write the word {word} to the file {new}.",
        "echo {word} > {new}",
        lambda f, t: {**f, t["new"]: [t["word"]]},
    ),
    "copy": ("Copy the file {old} to {new}.", "cp {old} {new}", lambda f, t: {**f, t["new"]: f[t["old"]]}),
    "rename": (
        "Rename the file {old} to {new}.",
        "mv {old} {new}",
        lambda f, t: {t["new"] if name == t["old"] else name: lines for name, lines in f.items()},
    ),
    "delete": (
        "Delete the file {old}.",
        "rm {old}",
        lambda f, t: {name: lines for name, lines in f.items() if name != t["old"]},
    ),
    "append": (
        "Append the word {word} to the file {old}.",
        "echo {word} >> {old}",
        lambda f, t: {**f, t["old"]: [*f[t["old"]], t["word"]]},
    ),
    "sort": (
        "Sort the lines of the file {old} into {new}.",
        "sort {old} > {new}",
        lambda f, t: {**f, t["new"]: sorted(f[t["old"]])},
    ),
    "first": (
        "Write the first {number} lines of the file {old} to {new}.",
        "head -n {number} {old} > {new}",
        lambda f, t: {**f, t["new"]: f[t["old"]][: t["number"]]},
    ),
    "last": (
        "Write the last {number} lines of the file {old} to {new}.",
        "tail -n {number} {old} > {new}",
        lambda f, t: {**f, t["new"]: f[t["old"]][-t["number"] :]},
    ),
    "filter": (
        "Write the lines of the file {old} that contain {inside} to {new}.",
        "grep {inside} {old} > {new}",
        lambda f, t: {**f, t["new"]: [line for line in f[t["old"]] if t["inside"] in line]},
    ),
    "count": (
        "Write the number of lines of the file {old} to {new}.",
        "wc -l < {old} > {new}",
        lambda f, t: {**f, t["new"]: [str(len(f[t["old"]]))]},
    ),
    "replace": (
        "Replace {inside} by {word} in the file {old}.",
        "sed -i s/{inside}/{word}/g {old}",
        lambda f, t: {**f, t["old"]: [line.replace(t["inside"], t["word"]) for line in f[t["old"]]]},
    ),
}


def room(choose, words):
    """Return three files, each with a few lines of two words."""
    names = choose.sample(words, 3)
    return {
        f"{name}.txt": [" ".join(choose.sample(words, 2)) for _ in range(choose.randint(4, 7))]
        for name in names
    }


def task(choose, words, kind, files):
    """Return the instruction of a task in a room, the command that solves it, and the files that it leaves."""
    ask, command, change = KINDS[kind]
    old = choose.choice([*files])
    used = {name.removesuffix(".txt") for name in files} | {
        word for line in files[old] for word in line.split()
    }
    new, word = choose.sample([word for word in words if word not in used], 2)
    inside = choose.choice(choose.choice(files[old]).split())
    terms = {"old": old, "new": f"{new}.txt", "word": word, "inside": inside, "number": choose.randint(2, 3)}
    return ask.format(**terms), command.format(**terms), change(files, terms)


def worked():
    """Return the conversation of the worked examples."""
    messages = [{"role": "system", "content": SYSTEM}]
    for instruction, command in EXAMPLES.items():
        turns = instruction, f"```sh\n{command}\n```", "[exit code 0]", "Done."
        messages += [
            {"role": ("user", "assistant")[turn % 2], "content": content}
            for turn, content in enumerate(turns)
        ]
    return messages


def write_task(directory, instruction, command, after):
    """Write the directory of a task: its instruction, hidden test and solution."""
    contents = {
        "task.toml": TASK,
        "instruction.md": f"{instruction}\n",
        "tests/test.sh": TEST,
        "solution/solve.sh": f"#!/bin/sh\n{command}\n",
        **{f"tests/files/{name}": text(lines) for name, lines in after.items()},
    }
    for name, content in contents.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)


def text(lines):
    """Return lines as the content of a file."""
    return "".join(f"{line}\n" for line in lines)


def rows(directory, place, split):
    """Write the tasks of a split, as many of each kind, and return their rows."""
    choose, words = random.Random(f"shell/{split}"), WORDS[split].split()
    rooms = [room(choose, words) for _ in range(ROOMS[split])]
    found = {}
    while len(found) < TASKS[split]:
        kind = [*KINDS][len(found) % len(KINDS)]
        before = choose.choice(rooms)
        instruction, command, after = task(choose, words, kind, before)
        if (instruction, *before) in found:
            continue
        name = f"{kind}-{len(found) + 1:03}"
        write_task(directory / "tasks" / split / name, instruction, command, after)
        found[instruction, *before] = {
            "prompt_id": name,
            "messages": [*worked(), {"role": "user", "content": instruction}],
            "ground_truth": command,
            "task": str(place / "tasks" / split / name),
            "files": {file: text(lines) for file, lines in before.items()},
        }
    return list(found.values())


if __name__ == "__main__":
    directory, place = Path(sys.argv[1]), Path(sys.argv[-1]).resolve()
    for part in WORDS:
        stored = "".join(json.dumps(row) + "\n" for row in rows(directory, place, part))
        (directory / f"{part}.jsonl").write_text(stored)
