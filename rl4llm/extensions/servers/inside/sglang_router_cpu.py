"""sglang-router next to an SGLang that cannot be imported unchanged, as on a machine without a GPU.

Run by the Python of the servers' environment: ``python sglang_router_cpu.py <the router's flags>``. The router uses
SGLang only for tracing, and works without it.
"""

import sys


def main() -> None:
    """Run the router until it is stopped."""
    sys.modules["sglang"] = None  # type: ignore[assignment] # importing it then fails at once, as if it were not installed

    from sglang_router.launch_router import main as route

    route()


if __name__ == "__main__":
    main()
