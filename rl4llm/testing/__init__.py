"""What users run on their own parts: contract checks, and fakes that stand in for the expensive ones."""

from rl4llm.testing.client import check_client
from rl4llm.testing.env import REPLIES, check_env
from rl4llm.testing.scripted import ClientCall, Script, ScriptedClient

__all__ = ["REPLIES", "ClientCall", "Script", "ScriptedClient", "check_client", "check_env"]
