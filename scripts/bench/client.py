"""What a server's client costs the trainer: processor time per request, and whether memory grows.

    python scripts/bench/client.py --episodes 10000

512 sessions at once play episodes of 3 turns against a server that answers at once with 64 tokens and log-probs, in a
separate process. All checks of requests and replies, and the decoding of the text, are included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from itertools import pairwise

import psutil
from aiohttp import web
from models import build_tokenizer

from rl4llm.core.types import SamplingParams
from rl4llm.extensions.servers.clients.sglang import SGLangClient

TURNS, PROMPT, NEW = 3, 128, 64
PARAMS = SamplingParams(max_tokens=NEW, ignore_eos=True)


def serve() -> None:
    """The other end: a canned reply to every request."""
    reply = {
        "text": "",
        "output_ids": list(range(10, 10 + NEW)),
        "meta_info": {
            "finish_reason": {"type": "length"},
            "weight_version": "1",
            "output_token_logprobs": [[-1.2345678, token, None] for token in range(10, 10 + NEW)],
        },
    }
    body = json.dumps(reply).encode()

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type="application/json")

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(site._server.sockets[0].getsockname()[1], flush=True)
        await asyncio.Event().wait()

    asyncio.run(run())


async def play(client: SGLangClient, episodes: int, sessions: int) -> list[tuple[int, float, int]]:
    """Requests done, processor seconds and resident bytes, after every 50th of the work."""
    left, done = iter(range(episodes)), 0
    process = psutil.Process()
    marks = [(0, time.process_time(), process.memory_info().rss)]

    async def session() -> None:
        nonlocal done
        for episode in left:
            prompt = [episode % 500] * PROMPT
            for _ in range(TURNS):
                completion = await client.generate(prompt, PARAMS, session=f"0/{episode}/0")
                prompt = [*prompt, *completion.token_ids]
                done += 1
                if done % (episodes * TURNS // 50) == 0:
                    marks.append((done, time.process_time(), process.memory_info().rss))
            await client.release(f"0/{episode}/0")

    await asyncio.gather(*(session() for _ in range(sessions)))
    await client.close()
    return marks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--sessions", type=int, default=512)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    server = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    try:
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        client = SGLangClient(url, build_tokenizer("1m"), vocab_size=512, context_length=4096)
        marks = asyncio.run(play(client, options.episodes, options.sessions))
    finally:
        server.kill()
    costs = [1e3 * (b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(marks)]
    print(f"{marks[-1][0]:,} requests of {options.sessions} sessions at once")
    print(
        f"client: {statistics.median(costs):.3f} ms of processor time per request ({min(costs):.3f} to {max(costs):.3f})"
    )
    tenth = marks[len(marks) // 10][2]
    print(
        f"resident memory: {tenth / 2**20:.0f} MiB after a tenth, {marks[-1][2] / 2**20:.0f} MiB at the end"
    )


if __name__ == "__main__":
    main()
