"""What a newcomer types wrong, and what the answer must contain: what is accepted, or the next step."""

import importlib
import json
import logging
import os
import shlex
import shutil
import socket
import subprocess
import sys

import pytest
import yaml

import rl4llm
from rl4llm.cli import COMMANDS as COMMAND_NAMES
from rl4llm.cli import build_parser, main
from rl4llm.core.errors import RL4LLMError

YAML = {
    "other.yaml": "rollout: {batch: 4}", "damaged.yaml": "\x01: [", "list.yaml": "- small", "empty.yaml": "",
    "refers.yaml": "model: {path: '${nowhere}'}",
}  # fmt: skip
PROMPTS = [{"prompt": f"What is {n}+1?", "ground_truth": str(n + 1)} for n in range(4)]
SMALL = {
    "data": {"path": "rows.jsonl"},
    "eval": {"every": 0},
    "rewards": [{"name": "length", "unit": "chars", "max_length": 1, "margin": 9}],
    "rollout": {"prompts": 2, "group_size": 2, "max_tokens": 2},
    "output": {"dir": "run"},
    "tracking": {"tensorboard": False, "episodes_every": 0},
    "checkpoint": {"every": 0},
    "max_steps": 1,
}
MODULES = {
    "mine.py": (
        "from rl4llm import BaseMDPEnv, BaseRewardFunction, ToolSet, tool\n\n\n"
        "def raises(completions, **columns):\n    return [columns['A'] for _ in completions]\n\n\n"
        "def one(completions):\n    return 1.0\n\n\n"
        "def equal(completions):\n    return [1.0 for _ in completions]\n\n\n"
        "def uneven(completions):\n    return [float(number) for number, _ in enumerate(completions)]\n\n\n"
        "def few(completions):\n    return [1.0]\n\n\n"
        "def wants(completions, level):\n    return [1.0] * len(completions)\n\n\n"
        "def nan(completions):\n    return [float('nan')] * len(completions)\n\n\n"
        "def text(completions):\n    return ['good'] * len(completions)\n\n\n"
        "class NoInit:\n    def __call__(self, messages, ground_truth):\n        return 1.0\n\n\n"
        "class Bare(BaseRewardFunction):\n    def __init__(self, name='bare'):\n        super().__init__(name)\n\n"
        "    def __call__(self, messages, ground_truth, **columns):\n        return messages[99].content\n\n\n"
        "class NoName(Bare):\n    def __init__(self, name='bare'):\n        pass\n\n\n"
        "class Fixed(BaseRewardFunction):\n    def __init__(self, name='fixed'):\n        super().__init__(name)\n\n"
        "    def __call__(self, messages, ground_truth):\n        return 1.0\n\n\n"
        "class Unfinished(BaseRewardFunction):\n    pass\n\n\n"
        "class Env(BaseMDPEnv):\n    continue_truncated = True\n\n"
        "    def respond(self, sample):\n        return sample.columns['nothing']\n\n\n"
        "class Words(BaseMDPEnv):\n    continue_truncated = True\n\n"
        "    def respond(self, sample):\n        return 'Well done.'\n\n\n"
        "class Appends(BaseMDPEnv):\n    continue_truncated = True\n\n"
        "    def respond(self, sample):\n        sample.messages.append(sample.last_message)\n        return []\n\n\n"
        "class Typo(BaseMDPEnv):\n    def respnd(self, sample):\n        return []\n\n\n"
        "class NoDataset(Words):\n    def __init__(self, *args, max_steps=1, **options):\n        pass\n\n\n"
        "def untyped(x):\n    \"\"\"Do.\"\"\"\n\n\n"
        "def silent(x: int) -> str:\n    return ''\n"
    ),
    "loss.py": (
        "from dataclasses import dataclass\n\nfrom rl4llm import GRPO\n\n\n"
        + "".join(
            f"@dataclass(slots=True)\nclass {name}(GRPO):\n    def {method}:\n        return {result}\n\n\n"
            for name, method, result in (
                ("Nan", "credits(self, group)", "group.rewards_G / 0"),
                ("Mean", "credits(self, group)", "group.rewards_G.mean()"),
                ("Ragged", "credits(self, group)", "[[1.0], []]"),
                ("Raises", "credits(self, group)", "group.reward_G"),
                ("None_", "batch_credits(self, groups, total)", "[]"),
                ("Summed", "surrogate(self, batch, new_BT)", "-new_BT.sum(), {}"),
                ("Rows", "token_losses(self, batch, new_BT, entropy_BT)", "-new_BT.mean(1), {}"),
                ("Alone", "token_losses(self, batch, new_BT, entropy_BT)", "-new_BT"),
                ("Metric", "token_losses(self, batch, new_BT, entropy_BT)", "-new_BT, {'seen': new_BT.mean()}"),
                ("Detached", "token_losses(self, batch, new_BT, entropy_BT)", "-new_BT.detach(), {}"),
            )
        )
    ),
    "broken.py": "import nothing_like_this\n",
    "typo.py": "def f(:\n",
}  # fmt: skip

KEYS = """
--training.lr 1e-4                                 | unrecognized arguments: --training.lr
--max-steps=x                                      | max_steps='x' is not accepted: a whole number
training.lr 1e-4                                   | 'training.lr' is not an override. Accepted: key.sub=value
training.lr= 1e-4                                  | '1e-4' is not an override. Accepted: key.sub=value
training.lr=fast                                   | training.lr='fast' is not accepted: a finite number, 0 or above
training.lr=-1                                     | training.lr=-1.0 is not accepted: a finite number, 0 or above
training.lrr=1                                     | Did you mean 'training.lr'
training.epochs=3                                  | Did you mean training.passes_per_rollout
training=1                                         | training=1 is not accepted: a mapping
max_steps=1.5                                      | max_steps=1.5 is not accepted: a whole number, 0 or above
max_steps=???                                      | max_steps is not set. Set it in the file, or with max_steps=...
max_steps=-1                                       | max_steps=-1 is not accepted: a whole number, 0 or above
rollout.group_size=0                               | rollout.group_size=0 is not accepted: a whole number, 1 or above
rollout.group_size=1                               | a group of one has zero advantage. Use 2 or more
rollout.temperature=0                              | Set rollout.temperature above 0
rollout.max_staleness=-1                           | rollout.max_staleness=-1 is not accepted: a whole number, 0 or above
rollout.temperature=-1                             | rollout.temperature=-1.0 is not accepted: a finite number, 0 or above
rollout.max_tokens=0                               | rollout.max_tokens=0 is not accepted: a whole number, 1 or above
rollout.top_p=2                                    | rollout.top_p=2.0 is not accepted: a finite number, above 0, at most 1
training.betas=[0.9]                               | training.betas=(0.9,) is not accepted: two numbers
training.updates_per_rollout=3                     | Use at most one per prompt (2)
training.constant_length=0                         | constant_length=0 is not accepted
rollout.max_failed_share=-3                        | max_failed_share=-3
algorithm=grpo                                     | algorithm='grpo' is not accepted: a mapping
algorithm.name=gpro                                | Did you mean 'grpo'
algorithm.name=null                                | algorithm.name is not set; `rl4llm info` lists the accepted names
algorithm.clip_hi=0.3                              | Did you mean 'clip_high'
algorithm.name=dpo | the column 'chosen' is missing. The row has: prompt ... Next: rename the column
inference.name=hf                                  | inference.name='hf' is unknown. Known: embedded, local, sglang, vllm
inference.timeout_s=3 | inference option='timeout_s' is unknown ... Did you mean 'stall_timeout_s'
backend.name=accelerate                            | backend.name='accelerate' is unknown. Known: deepspeed, torch
backend.shard=zero3                                | backend.shard='zero3' is not accepted: none, ddp
model.path=nowhere/model                           | Check the name and the network
model.path=empty                                   | 'empty' cannot be loaded
model.path=bare                                    | 'bare' cannot be loaded
model.path=foreign | does not match the model 'foreign': its token ids go up to ... Use the tokenizer that was saved with
model.path=null                                    | model.path=None is not accepted: a string. Set a value
model.dtype=fp16                                   | model.dtype='fp16' is not accepted: float32 or bfloat16
model.lora=16                                      | model.lora=16 is not accepted: a mapping
model.path=unfinished                              | model.path='unfinished' is a run that has not finished
model.lora.rank=-4                                 | model.lora.rank=-4 is not accepted: a whole number, 0 or above
model.lora.targets=[qkv]                           | have no effect without an adapter. Set model.lora.rank
checkpoint.every=0.5                               | checkpoint.every=0.5 is not accepted: a whole number, 0 or above
output.dir=rows.jsonl | output.dir='rows.jsonl' is a file, not a directory. Choose another output.dir
seed=abc                                           | seed='abc' is not accepted: a whole number, 0 to
tracking.wandb=maybe                               | tracking.wandb='maybe' is not accepted: true or false
sync.name=nccl                                     | sync.name='nccl' is unknown. Known: distributed, filesystem
"""
DATA = """
"data.path=''"                                     | data.path is not set. Set it in the YAML file, or with data.path=
data.path=null                                     | data.path is not set. Set it in the YAML file, or with data.path=
data.path=row.jsonl                                | Did you mean 'rows.jsonl'
data.path=rows.txt                                 | this file type is not supported. Accepted: .jsonl
data.path=empty                                    | the split 'train' was not found. Accepted: train.jsonl
data.path=empty.jsonl                              | the dataset is empty (split 'train'). Next step: check data.path
data.path=broken.jsonl | broken.jsonl:2: not valid JSON: Expecting property name enclosed in double quotes
data.path=latin1.csv                               | is not UTF-8. Next step: convert the file
data.path=o.jsonl rewards=[math] | o.jsonl:1 (prompt ... set data.answer_column to its column (the row has: prompt, solution)
data.path=ended.jsonl | ended.jsonl:1: the prompt ends with a message of role 'assistant' ... Remove that message
data.path=strings.jsonl | strings.jsonl:1: a row must be a mapping of columns, like {'prompt': ...}
data.path=roles.jsonl | roles.jsonl:1 ... 'robot' is not accepted. Accepted: system, user, assistant, tool
data.path=questions.jsonl                          | Next step: set data.prompt_column to the column of the prompt
data.path=long.jsonl                               | long.jsonl:2 (prompt ... set data.bad_rows=skip
data.prompt_column=question                        | data.prompt_column='question' is unknown. Known: ground_truth, prompt
data.answer_column=ground_trth                     | Did you mean 'ground_truth'
"data.answer_pattern='####(.+)'"                   | does not match data.answer_pattern ... Next: change the pattern
data.answer_pattern=(                              | is not a regular expression: missing )
"data.prompt_template='Solve:'"                    | has no {prompt}, the place of the prompt
data.limit=0                                       | data.limit=0 is not accepted: a whole number, 1 or above, or null
data.bad_rows=truncate                             | data.bad_rows='truncate' is not accepted: stop or skip
"output.dir=''"                                    | output.dir is empty. Set it to the directory of the run
"eval.path=''" eval.every=1                        | Set eval.path to other prompts, or eval.every=0
output.dir=null                                    | output.dir=None is not accepted: a string. Set a value
sync.dir=None                                      | sync.dir='None' is not accepted: a string or null. Did you mean null
data.split=validation data.path=splits | the split 'validation' ... The directory contains train.jsonl
eval.every=1                                       | Set eval.path to other prompts, or eval.every=0
data.path=picture.jsonl | picture.jsonl:1: the column 'image' holds pictures ... set data.bad_rows=skip
data.path=arithmetic data.system_prompt=Hi | have no effect on generated prompts. Remove them
"""
CODE = """
rewards=[maths]                                    | Did you mean 'math'
rewards=[math,length]                              | Reward 'length' needs the option max_length
rewards=[3]                                        | rewards has 3. Accepted: a name, or a mapping with name
'parts={a: 3}'                                     | parts.a=3 is not accepted: a mapping
parts.a=null                                       | parts.a=None is not accepted: a mapping
'env={name: roles, instructions: {agent: "{\\"a\\": 1}"}}' | env.instructions.agent: KeyError('"a"'). Write a
rewards=math                                       | rewards='math' is not accepted: a list or null. Did you mean [math]
'rewards=[{math: 1}]'                               | A reward needs 'name', one of: ... clip, code,
'rewards=[{nam: math}]'                             | or 'package.module:Thing'; got {'nam': 'math'}. Did you mean 'name'
'rewards=[{name: math, wieght: 2}]'                | 'math'='wieght' is unknown ... Did you mean 'weight'
'rewards=[{name: scale, factor: 2, reward: {nam: math}}]' | got {'nam': 'math'}. Did you mean 'name'
'parts={a: {rewards: [{nmae: math}]}}'             | parts.a: A reward needs ... got {'nmae': 'math'}. Did you mean 'name'
algorithm.nam=grpo                                 | algorithm option='nam' is unknown ... Did you mean 'name'
inference.nam=local                                | inference option='nam' is unknown ... Did you mean 'name'
inference.name=sglang inference.ulr=http://x       | inference option='ulr' is unknown ... Did you mean 'url'
backend.nam=torch                                  | backend option='nam' is unknown ... Did you mean 'name'
env.nam=tool                                       | env option='nam' is unknown ... Did you mean 'name'
env.name=tool 'env.tools=[{nam: calculator}]'      | a tool needs 'name' ... {'nam': 'calculator'}. Did you mean 'name'
env.name=tool 'env.tools=[{name: calculator, x: 1}]' | env.tools: {'name': 'calculator', 'x': 1} is not accepted
'rewards=[{name: math, weight: much}]'             | weight of 'math'='much' is not accepted: a finite number
'rewards=[{name: math, extract: box}]'             | extract='box' is not accepted ... Did you mean 'boxed'
env.template_arg={}                                | env option='template_arg' is unknown ... Did you mean 'template_args'
env.thoughts=dorp                                  | env.thoughts='dorp' is not accepted: keep, drop or refuse. Did you mean
env.template_args=5                                | env.template_args=5 is not accepted: a mapping or null
env.remot=localhost:5                              | env option='remot' is unknown ... Did you mean 'remote'
env.remote=localhost:5 env.thoughts=dorp           | env.thoughts='dorp' is not accepted: keep, drop or refuse
"rewards=['mine:nothing']" | module 'mine' has no attribute 'nothing'. Accepted: a registered name
"rewards=['mine:wnats']" | has no attribute 'wnats'. Did you mean 'wants'? Accepted
"rewards=['nowhere:f']" | 'nowhere:f' cannot be imported: No module named 'nowhere'. Accepted: a registered name
"rewards=['broken:f']"                             | 'broken:f' cannot be imported: No module named 'nothing_like_this'
"rewards=['typo:f']"                               | invalid syntax (typo.py, line 1)
"rewards=['mine:NoInit']"                          | reward 'NoInit' raised TypeError: NoInit() takes no arguments
"rewards=['mine:Unfinished']" | the class Unfinished does not define __call__
"rewards=['mine:NoName']"                          | The reward NoName: __init__ must call super().__init__(name)
"rewards=['mine:Fixed']"                           | raised TypeError: Fixed.__call__() got an unexpected keyword argument
"rewards=['mine:raises']"                          | reward 'raises' raised KeyError: 'A' (mine.py:5)
"rewards=['mine:Bare']"                            | reward 'bare' raised IndexError: list index out of range (mine.py:
"rewards=['mine:one']"                             | Reward 'one' returned 1.0 for 2 samples. Accepted: a list of 2 numbers
"rewards=['mine:few']" | Reward 'few' returned 1 scores for 2 samples. Accepted: a list of 2 numbers
"rewards=['mine:wants']" | wants() missing 1 required positional argument: 'level'
"rewards=['mine:nan']"                             | reward 'nan' returned nan, not a finite number
"rewards=['mine:text']"                            | reward 'text' returned 'good', not a finite number
algorithm.name=loss:Nan "rewards=['mine:uneven']"  | Nan returned credits that are not finite ... (loss.py:8)
algorithm.name=loss:Mean                           | credits of shape (). Accepted: shape (2,), a number for each
algorithm.name=loss:Ragged                         | returned credits of type list. Accepted ... (loss.py:20)
algorithm.name=loss:Raises                         | algorithm Raises raised AttributeError: 'Group' ... (loss.py:27)
algorithm.name=loss:None_                          | returned credits of 0 groups. Accepted: those of 2 (loss.py:32)
algorithm.name=loss:Summed "rewards=['mine:uneven']" | returned losses of shape (). Accepted ... (loss.py:38)
algorithm.name=loss:Rows "rewards=['mine:uneven']" | returned losses of shape (1,). Accepted ... (loss.py:44)
algorithm.name=loss:Alone "rewards=['mine:uneven']" | returned shape (1, ... Accepted: (losses_BT, metrics) ... (loss.py:50)
algorithm.name=loss:Metric "rewards=['mine:uneven']" | returned seen of shape (). Accepted ... (loss.py:56)
algorithm.name=loss:Detached "rewards=['mine:uneven']" | returned losses without a gradient ... (loss.py:62)
rewards=[] rollout.group_size=2                    | Set rewards, for example rewards=[math]
env.name=mine:Env env.max_steps=2                  | KeyError: 'nothing' (mine.py:
env.name=mine:Words env.max_steps=2 | Words.respond must return a list of ChatMessage ([] ends the episode), not 'Well done.'
env.name=mine:Appends env.max_steps=2              | Appends.respond changed sample.messages; return the new messages
env.name=mine:Typo env.max_steps=2                 | max_steps=2 has no effect, since Typo has no method `respond`
env.max_steps=2                                    | max_steps=2 has no effect, since ChatEnv has no method `respond`
env.name=mine:one                                  | Accepted: a subclass of BaseMDPEnv
env.name=tools                                     | Did you mean 'tool'
env.tools=[calculator]                             | env option='tools' is unknown. Known: compact_at, max_steps
env.name=tool env.tools=[calculatr]                | Did you mean 'calculator'
env.name=tool "env.tools=['mine:untyped']" | x is missing a type hint in function untyped (mine.py:98). Next step
env.name=tool "env.tools=['mine:silent']"          | it has no docstring (mine.py:102). Next step
env.name=reasoning_gym rewards=null                | has its own prompts. Remove data.path
env.max_steps=0                                    | env.max_steps=0 is not accepted: a whole number, 1 or above
"""
COMMANDS = """
tasks import nowhere.jsonl --repos r --out o           | The dataset 'nowhere.jsonl' does not exist
train                                              | required: config
train model.path=m data.path=d                     | No such file or directory: 'model.path=m'
train smal.yaml                                    | No such file or directory: 'smal.yaml'
tran small.yaml                                    | 'tran' is unknown. Known: ... Did you mean 'train'
chat small.yaml --part other                       | --part other is not a part. This run has
train small.yaml other.yml                         | No such file or directory: 'other.yml'
launch small.yaml training.lrr=1                   | Did you mean 'training.lr'
launch small.yaml --on slurn                       | Did you mean 'slurm'
eval small.yaml                                    | Set eval.path to other prompts, or eval.every=0
eval gsm9k --model model                           | Did you mean 'gsm8k'
collect small.yaml --out episodes.txt              | Accepted: .jsonl or .parquet, or a directory
export run --out exported                          | is not a run: config.yaml is missing. Accepted: the output.dir of a run
export small.yaml --out exported                   | is not a run: config.yaml is missing. Accepted: the output.dir of a run
view small.yaml                                    | is not a directory. Accepted: output.dir of a run
check empty                                        | holds no optimizer step ... name one that a run wrote
collect nowhere.yaml --out x.jsonl               | No such file or directory: 'nowhere.yaml'
train .                                          | Is a directory: '.'
eval small.yaml --out nowhere/x.json             | nowhere/x.json cannot be written: No such file
eval small.yaml --compare nowhere.json           | nowhere.json
grade nowhere.jsonl                              | The dataset 'nowhere.jsonl' does not exist
export nowhere --out x                           | nowhere is not a run
view nowhere                                     | 'nowhere' does not exist
run nowhere.py                                   | nowhere.py is not a file of Python
run small.yaml                                   | small.yaml is not a file of Python
recipe quickstart --dir small.yaml                      | small.yaml
import nowhere.yaml                              | The file nowhere.yaml does not exist
import damaged.yaml                              | damaged.yaml cannot be read
serve env --env nowhere --port 0                 | 'nowhere' is unknown
train small.yaml output.dir=broken               | run.json is damaged
eval small.yaml output.dir=broken                | No checkpoint in broken/checkpoints can be used
export broken --out x                            | No checkpoint in broken/checkpoints can be used
check broken/failed/step-000001                 | holds no optimizer step
check broken/failed/step-000002                 | holds no optimizer step
launch other.yaml                                | other.yaml: Unknown configuration key 'rollout.batch'
train damaged.yaml                               | damaged.yaml: not valid YAML
train list.yaml                                  | list.yaml: the content
train empty.yaml                                 | model.path is not set
train refers.yaml                                | model.path: Interpolation key 'nowhere' not found
train small.yaml model.device=cuda:99            | model.device='cuda:99' is not available: torch
plan small.yaml model.device=cuda:99             | `rl4llm plan --device-memory`
view broken --port {port}                        | --port {port} cannot be used
serve env --env chat --port {port}               | Port {port}
serve --model-path {model} --python {python} --port {port} | Port {port}
train small.yaml output.dir={locked}/run         | {locked}/run
eval small.yaml --out {locked}/x.json            | {locked}/x.json cannot be written
collect small.yaml --out {locked}/x.jsonl        | {locked}
view broken --export {locked}/x.html             | {locked}/x.html cannot be written
recipe quickstart --dir {locked}/quick                  | {locked}/quick
view broken --port 99999                         | 0-65535. Next: use 0 for any free one
train small.yaml training.lr=${{                 | training.lr: no viable alternative
recipe run nowhere                               | recipe='nowhere' is unknown. Known:
train small.yaml rollout.prompts=1000000000000000 | MemoryError: Unable to allocate
train small.yaml env.name=os:path                | Accepted: a subclass of BaseMDPEnv
train small.yaml inference.name=sglang inference.url=http://127.0.0.1:99999 | http://HOST:PORT
serve env --env chat --port 0 sandbox.level=nowhere | sandbox.level='nowhere' is unknown
launch small.yaml output.dir=small.yaml          | output.dir='small.yaml' is a file, not a directory
launch small.yaml model.path=./nowhere           | model.path='./nowhere' cannot be loaded: there is no such directory
launch small.yaml data.path=smal.yaml            | The dataset 'smal.yaml' does not exist
train small.yaml env.remote=3                    | env.remote=3 is not accepted
view broken --export pipe                        | pipe cannot be written: it exists but is not a regular
info --completion csh                            | 'csh' is unknown. Known: bash, fish, zsh
collect small.yaml                               | required: --out
"""


def said_all(parts, told):
    """Return whether a text has all the parts between ` ... `, in this order."""
    place = 0
    for part in parts.split(" ... "):
        place = told.find(part, place)
        if place < 0:
            return False
    return True


def table(text):
    rows = [[cell.strip() for cell in line.rsplit("|", 1)] for line in text.strip().splitlines()]
    return [pytest.param(*row, id=f"{row[0]}: {row[1]}") for row in rows]


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    """Return a directory in which even root can create nothing."""
    directory = tmp_path_factory.mktemp("locked")
    if os.geteuid():
        directory.chmod(0o555)
        yield directory
        directory.chmod(0o755)
        return
    ways = (
        (["mount", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", directory], ["umount", directory]),
        (["chattr", "+i", directory], ["chattr", "-i", directory]),
    )
    for lock, unlock in ways:
        if shutil.which(lock[0]) and subprocess.run(lock, capture_output=True).returncode == 0:
            yield directory
            subprocess.run(unlock, check=True)
            return
    pytest.skip("root can write everywhere here: neither mount nor chattr may be used")


@pytest.fixture(scope="module")
def taken():
    """Return a port that is in use."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture(scope="module")
def place(model_dir, tmp_path_factory):
    """Return a directory with a small configuration that trains, and everything that the mistakes name."""
    directory = tmp_path_factory.mktemp("mistakes")
    (directory / "small.yaml").write_text(yaml.safe_dump({**SMALL, "model": {"path": str(model_dir)}}))
    for name, text in MODULES.items():
        (directory / name).write_text(text)
    asked = {"role": "user", "content": "1+1?"}
    files = {
        "rows.jsonl": PROMPTS,
        "o.jsonl": [{"prompt": "1+1?", "solution": "2"}],
        "ended.jsonl": [{"prompt": [asked, {"role": "assistant", "content": "2"}], "ground_truth": "2"}],
        "strings.jsonl": ["1+1?"],
        "roles.jsonl": [{"messages": [{"role": "robot", "content": "1+1?"}], "ground_truth": "2"}],
        "questions.jsonl": [{"question": "1+1?", "ground_truth": "2"}],
        "long.jsonl": [*PROMPTS[:1], {"prompt": "1+" * 2000, "ground_truth": "2"}],
        "picture.jsonl": [{**PROMPTS[0], "image": "1.png"}],
        "splits/train.jsonl": PROMPTS,
    }
    for name in ("empty", "busy", "splits", "unfinished"):
        (directory / name).mkdir()
    (directory / "unfinished" / "run.json").touch()
    for name, rows in files.items():
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "broken.jsonl").write_text(json.dumps(PROMPTS[0]) + "\n{'prompt': 'x'}\n")
    (directory / "latin1.csv").write_bytes("prompt,ground_truth\ncafé,1\n".encode("latin-1"))
    for name in ("empty.jsonl", "rows.txt", "busy/thesis.tex"):
        (directory / name).touch()
    shutil.copytree(model_dir, directory / "model")
    shutil.copytree(model_dir, directory / "bare")
    for file in [*(directory / "bare").glob("token*"), *(directory / "bare").glob("special*")]:
        file.unlink()
    shutil.copytree(model_dir, directory / "foreign")
    config = json.loads((directory / "foreign" / "config.json").read_text())
    (directory / "foreign" / "config.json").write_text(json.dumps(config | {"vocab_size": 99}))
    for name, text in YAML.items():
        (directory / name).write_text(text)
    os.mkfifo(directory / "pipe")
    damaged_run(directory / "broken", model_dir)
    return directory


def damaged_run(broken, model_dir):
    """Make a run in which everything is damaged."""
    for part in ("checkpoints/step-000001", "failed/step-000001", "failed/step-000002", "episodes"):
        (broken / part).mkdir(parents=True)
    (broken / "config.yaml").write_text(yaml.safe_dump({**SMALL, "model": {"path": str(model_dir)}}))
    (broken / "run.json").write_text('{"run_id": ')
    (broken / "checkpoints" / "step-000001" / "state.json").write_text("{}")
    (broken / "failed" / "step-000001" / "update.json").write_text("[")
    (broken / "failed" / "step-000002" / "update.json").write_text("{}")
    shutil.copy(model_dir / "model.safetensors", broken / "failed" / "step-000002" / "batches.safetensors")


def answer(capsys, words):
    """Return the exit code of a command, and what it printed in one line."""
    try:
        code = main(words)
    except SystemExit as ended:  # argparse
        code = ended.code
    out, err = capsys.readouterr()
    told = " ".join((out + err).split())
    if table_of_answers := os.environ.get("RL4LLM_MISTAKES"):
        with open(table_of_answers, "a") as file:
            file.write(f"| `{shlex.join(words)}` | {code} | {told} |\n")
    return code, told


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    yield place
    shutil.rmtree(place / "run", ignore_errors=True)


@pytest.mark.parametrize(("words", "said"), table(KEYS + DATA.lstrip() + CODE.lstrip()))
def test_a_wrong_key_is_answered_with_the_next_step(words, said, capsys):
    code, told = answer(capsys, ["train", "small.yaml", *shlex.split(words)])
    assert code in (1, 2), told
    assert said_all(said, told), told
    assert "Traceback" not in told


@pytest.mark.parametrize(("words", "said"), table(COMMANDS))
def test_a_wrong_command_is_answered_with_the_next_step(words, said, here, taken, model_dir, request, capsys):
    names = {"port": taken, "model": model_dir, "python": sys.executable}
    if "{locked}" in words:
        names["locked"] = request.getfixturevalue("locked")
    before = files(here)
    code, told = answer(capsys, shlex.split(words.format(**names)))
    assert code in (1, 2), told
    assert said_all(said.format(**names), told), told
    assert "Traceback" not in told
    assert files(here) == before


def files(directory):
    """Return all of them except the lock of a run that was tried."""
    return sorted(path for path in directory.rglob("*") if path.name != ".lock")


def test_every_command_has_its_mistake():
    (commands,) = (action.choices for action in build_parser()._actions if action.choices)
    tried = {line.split()[0] for line in COMMANDS.strip().splitlines()} - {"tran"}
    assert tried == set(commands) == set(COMMAND_NAMES)


def test_the_untouched_configuration_trains(capsys):
    code, told = answer(capsys, ["train", "small.yaml"])
    assert code == 0, told


@pytest.mark.parametrize(
    ("reward", "lr", "learns"), [("equal", 1e-3, False), ("uneven", 1e-3, True), ("uneven", 1e-30, False)]
)
def test_a_run_that_learned_nothing_is_reported_at_its_end(reward, lr, learns, capsys):
    code, told = answer(capsys, ["train", "small.yaml", f"rewards=['mine:{reward}']", f"training.lr={lr}"])
    assert code == 0, told
    assert ("no update since this start changed the weights" in told) is not learns


def test_debug_shows_the_line_of_ones_own_reward(caplog, monkeypatch):
    monkeypatch.setattr("rl4llm.runtime.raised._shown", set())  # of earlier tests
    caplog.set_level(logging.WARNING, "rl4llm")  # put back afterwards
    with pytest.raises(RL4LLMError, match=r"mine\.py:5"):
        main(["train", "small.yaml", "rewards=['mine:raises']", "--debug"])
    assert "return [columns['A'] for _ in completions]" in caplog.text


def mine(name):
    return getattr(importlib.import_module("mine"), name)


IN_PYTHON = {
    "a table of pandas": (lambda model: {"dataset": __import__("pandas").DataFrame(PROMPTS)}, "to_dict"),
    "a single row": (lambda model: {"dataset": PROMPTS[0]}, "split"),
    "texts": (lambda model: {"dataset": ["1+1?"]}, "a row must be a mapping"),
    "no rows": (lambda model: {"dataset": []}, "the dataset is empty"),
    "two rewards": (lambda model: {"reward_functions": [mine("one"), mine("equal")]}, "reward_transform_fn"),
    "a reward that is a number": (lambda model: {"reward_functions": [1.0]}, "is not a reward"),
    "a reward class of another base": (
        lambda model: {"reward_functions": [type("NoInit", (), {"__call__": lambda self: 0})]},
        "NoInit\\(\\) takes no arguments",
    ),
    "an unknown keyword": (lambda model: {"learning_rat": 1}, "learning_rat"),
}


@pytest.mark.parametrize("mistake", IN_PYTHON)
def test_a_mistake_in_python_is_answered_with_the_next_step(mistake, model_dir):
    wrong, said = IN_PYTHON[mistake]
    given = {"model": str(model_dir), "dataset": PROMPTS, "reward_functions": ["math"], "eval.every": 0}
    keys = {name: value for name, value in given.items() if "." not in name} | wrong(model_dir)
    with pytest.raises((RL4LLMError, TypeError), match=said):
        rl4llm.GRPOTrainer(**keys, eval={"every": 0}).train()
