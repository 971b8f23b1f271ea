"""sglang-router next to an SGLang that cannot be imported unchanged, as on a machine without a GPU.

scripts/install_sglang_cpu.sh copies this into the servers' environment. The router uses SGLang only for tracing, and works
without it.
"""

import sys


def main() -> None:
    """Run the router until it is stopped."""
    sys.modules["sglang"] = None  # type: ignore[assignment] # importing it then fails at once, as if it were not installed

    from sglang_router.launch_router import main as route

    route()


if __name__ == "__main__":
    main()
