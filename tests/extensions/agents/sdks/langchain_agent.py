import sys

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI


def calculator(expression: str) -> str:
    """Computes."""
    return "85"


MODELS = {
    "chat": lambda: ChatOpenAI(model="policy"),
    "responses": lambda: ChatOpenAI(model="policy", use_responses_api=True),
    "messages": lambda: ChatAnthropic(model="policy", max_tokens=300),
}
agent = create_agent(MODELS[sys.argv[1]](), tools=[calculator], system_prompt="Be brief.")
asked = {"messages": [{"role": "user", "content": "How many?"}]}
if sys.argv[2:] == ["stream"]:
    for _ in agent.stream(asked, stream_mode="messages"):
        pass
else:
    assert agent.invoke(asked)["messages"][-1].text == "Answer: 85"
