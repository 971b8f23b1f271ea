from rl4llm_compat.trl.arguments import DPOConfig as DPOConfig
from rl4llm_compat.trl.arguments import GRPOConfig as GRPOConfig
from rl4llm_compat.trl.arguments import KTOConfig as KTOConfig
from rl4llm_compat.trl.arguments import RewardConfig as RewardConfig
from rl4llm_compat.trl.arguments import RLOOConfig as RLOOConfig
from rl4llm_compat.trl.arguments import SFTConfig as SFTConfig
from rl4llm_compat.trl.data_utils import apply_chat_template as apply_chat_template
from rl4llm_compat.trl.data_utils import extract_prompt as extract_prompt
from rl4llm_compat.trl.data_utils import is_conversational as is_conversational
from rl4llm_compat.trl.data_utils import is_conversational_from_value as is_conversational_from_value
from rl4llm_compat.trl.data_utils import maybe_apply_chat_template as maybe_apply_chat_template
from rl4llm_compat.trl.data_utils import maybe_convert_to_chatml as maybe_convert_to_chatml
from rl4llm_compat.trl.data_utils import maybe_extract_prompt as maybe_extract_prompt
from rl4llm_compat.trl.data_utils import (
    maybe_unpair_preference_dataset as maybe_unpair_preference_dataset,
)
from rl4llm_compat.trl.data_utils import unpair_preference_dataset as unpair_preference_dataset
from rl4llm_compat.trl.functions import accuracy_reward as accuracy_reward
from rl4llm_compat.trl.functions import get_cosine_scaled_reward as get_cosine_scaled_reward
from rl4llm_compat.trl.functions import get_repetition_penalty_reward as get_repetition_penalty_reward
from rl4llm_compat.trl.functions import get_soft_overlong_punishment as get_soft_overlong_punishment
from rl4llm_compat.trl.functions import reasoning_accuracy_reward as reasoning_accuracy_reward
from rl4llm_compat.trl.functions import think_format_reward as think_format_reward
from rl4llm_compat.trl.parser import DatasetConfig as DatasetConfig
from rl4llm_compat.trl.parser import DatasetMixtureConfig as DatasetMixtureConfig
from rl4llm_compat.trl.parser import ModelConfig as ModelConfig
from rl4llm_compat.trl.parser import ScriptArguments as ScriptArguments
from rl4llm_compat.trl.parser import TrlParser as TrlParser
from rl4llm_compat.trl.parser import get_dataset as get_dataset
from rl4llm_compat.trl.parser import get_kbit_device_map as get_kbit_device_map
from rl4llm_compat.trl.parser import get_peft_config as get_peft_config
from rl4llm_compat.trl.parser import get_quantization_config as get_quantization_config
from rl4llm_compat.trl.trainers import DPOTrainer as DPOTrainer
from rl4llm_compat.trl.trainers import GRPOTrainer as GRPOTrainer
from rl4llm_compat.trl.trainers import KTOTrainer as KTOTrainer
from rl4llm_compat.trl.trainers import RewardTrainer as RewardTrainer
from rl4llm_compat.trl.trainers import RLOOTrainer as RLOOTrainer
from rl4llm_compat.trl.trainers import SFTTrainer as SFTTrainer

__all__: list[str]
