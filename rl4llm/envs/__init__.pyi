from rl4llm.core.tables import ENVIRONMENTS as ENVIRONMENTS
from rl4llm.core.tables import register_env as register_env
from rl4llm.envs.chat import ChatEnv as ChatEnv
from rl4llm.envs.debate import DebateEnv as DebateEnv
from rl4llm.envs.roles import RolesEnv as RolesEnv
from rl4llm.envs.tool import ToolMDPEnv as ToolMDPEnv
