"""Inference servers: their clients, the ways of weights to them, and what starts one."""

PROVIDES = {
    "rl4llm.engines": {
        "embedded": "rl4llm.extensions.servers.clients.embedded:EmbeddedClient",
        "sglang": "rl4llm.extensions.servers.clients.sglang:SGLangClient",
        "vllm": "rl4llm.extensions.servers.clients.vllm:VLLMClient",
    },
    "rl4llm.publishers": {
        "distributed": "rl4llm.extensions.servers.sync.distributed:over_broadcast",
        "filesystem": "rl4llm.extensions.servers.sync.filesystem:over_filesystem",
        "lora": "rl4llm.extensions.servers.sync.filesystem:over_adapter",
    },
    "rl4llm.parts": {
        "claiming_publisher": "rl4llm.extensions.servers.sync.wrappers:ClaimingPublisher",
        "cohost_publisher": "rl4llm.extensions.servers.sync.wrappers:CohostPublisher",
        "fallback_publisher": "rl4llm.extensions.servers.sync.wrappers:FallbackPublisher",
        "fleet": "rl4llm.extensions.servers.fleet.build:build_fleet",
        "free_device": "rl4llm.extensions.servers.sync.wrappers:free_device",
        "serve": "rl4llm.extensions.servers.launch:serve",
        "start_server": "rl4llm.extensions.servers.launch:launch",
        "teacher": "rl4llm.extensions.servers.teacher:ServedTeacher",
        "weight_store": "rl4llm.extensions.servers.sync.shared_memory:open_store",
    },
}
