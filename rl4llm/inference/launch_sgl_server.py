"""Start an SGLang server: ``python -m rl4llm.inference.launch_sgl_server --model-path M [every flag of SGLang]``.

Flags beside SGLang's: ``--python PATH`` of the environment that SGLang is installed in (or RL4LLM_SGLANG_PYTHON), ``--cpu``
for tests and small models on a machine without a GPU, ``--log PATH``, ``--ready-within S``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rl4llm.core.errors import ConfigError, RL4LLMError
from rl4llm.core.registry import from_extension
from rl4llm.runtime.terminal import visible


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until stopped; return the exit code: 130 after Ctrl-C, 143 after SIGTERM, 1 or 2 after an error."""
    try:
        serve = from_extension("serve", "launch_sgl_server")
        return serve(sys.argv[1:] if arguments is None else arguments, engine="sglang")
    except RL4LLMError as error:
        sys.stderr.write(visible(f"{type(error).__name__}: {error}") + "\n")
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main())
