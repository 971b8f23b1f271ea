"""Tools of verifiers for tests: a separate server, which `verifiers_tasks` starts for each rollout."""

import verifiers.v1 as vf


class LetterToolset(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def count(self, word: str) -> str:
        """Count the letters of a word."""
        return f"{len(word)} letters"


if __name__ == "__main__":
    LetterToolset.run()
