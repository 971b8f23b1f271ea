#!/usr/bin/env bash
# For the train_*.sh scripts: start_server ENGINE PORT MODEL [flags ...] starts one and waits until it is healthy.
# Should it die it is started again, and the trainer gives it the newest weights before it asks it anything. It is stopped
# when the script that sources this ends, however it ends.

# model_of CONFIG [key.sub=value ...] prints the model.path of a run with these arguments.

model_of() {
  python -c 'import sys; from rl4llm.config import load_config
print(load_config(sys.argv[1], [word for word in sys.argv[2:] if not word.startswith("-")]).model.path)' "$@"
}

start_server() {
  local engine="$1" port="$2" model="$3"
  shift 3
  if [ "$engine" = sglang ]; then set -- --model-path "$model" "$@"; else set -- "$model" "$@"; fi
  [ -n "${CUDA_VISIBLE_DEVICES:-}" ] || command -v nvidia-smi > /dev/null 2>&1 || set -- --cpu "$@"  # tests, small models
  rl4llm serve --engine "$engine" --port "$port" --restarts 3 "$@" &
  server=$!
  trap 'kill "$server" 2> /dev/null || true; wait "$server" || true' EXIT
  until python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$port/health', timeout=20)" 2> /dev/null; do
    kill -0 "$server" 2> /dev/null || { echo "The server ended before it was ready; see above." >&2; exit 1; }
    sleep 1
  done
}
