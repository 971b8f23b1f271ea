from rl4llm.compose.choices import check_config as check_config
from rl4llm.compose.engines import server_urls as server_urls
from rl4llm.compose.models import build_model as build_model
from rl4llm.compose.models import build_teacher as build_teacher
from rl4llm.compose.setup import Given as Given
from rl4llm.compose.setup import build_algorithm as build_algorithm
from rl4llm.compose.trainer import build_trainer as build_trainer
