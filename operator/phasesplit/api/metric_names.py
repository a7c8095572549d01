"""Every metric that router and workers expose and the operator reads. Prefix `phasesplit_`.

Stems follow vLLM so that dashboards map. Labels never carry a request id.
"""

PREFIX = "phasesplit_"

# Router.
TIME_TO_FIRST_TOKEN_SECONDS = PREFIX + "time_to_first_token_seconds"
INTER_TOKEN_LATENCY_SECONDS = PREFIX + "inter_token_latency_seconds"
SECOND_TOKEN_GAP_SECONDS = PREFIX + "second_token_gap_seconds"
REQUEST_TIME_PER_OUTPUT_TOKEN_SECONDS = PREFIX + "request_time_per_output_token_seconds"
E2E_REQUEST_LATENCY_SECONDS = PREFIX + "e2e_request_latency_seconds"
REQUEST_QUEUE_TIME_SECONDS = PREFIX + "request_queue_time_seconds"
SLO_REQUESTS_TOTAL = PREFIX + "slo_requests_total"
SLO_ATTAINED_REQUESTS_TOTAL = PREFIX + "slo_attained_requests_total"
REJECTED_REQUESTS_TOTAL = PREFIX + "rejected_requests_total"
REQUESTS_IN_FLIGHT = PREFIX + "requests_in_flight"
PROMPT_TOKENS = PREFIX + "prompt_tokens"  # histogram of tokens per request
OUTPUT_TOKENS = PREFIX + "output_tokens"  # histogram of tokens per request
LOCAL_PREFILLS_TOTAL = PREFIX + "local_prefills_total"
MIGRATIONS_TOTAL = PREFIX + "migrations_total"

# Worker.
NUM_REQUESTS_RUNNING = PREFIX + "num_requests_running"
NUM_REQUESTS_WAITING = PREFIX + "num_requests_waiting"
KV_CACHE_USAGE_PERC = PREFIX + "kv_cache_usage_perc"  # 0 to 1
PREFIX_CACHE_HITS_TOTAL = PREFIX + "prefix_cache_hits_total"
STEP_SECONDS = PREFIX + "step_seconds"  # label mix: prefill | decode | mixed
STEP_TOKENS = PREFIX + "step_tokens"  # label kind: prefill | decode
NUM_PREEMPTIONS_TOTAL = PREFIX + "num_preemptions_total"
KV_TRANSFER_SECONDS = PREFIX + "kv_transfer_seconds"
KV_TRANSFER_BYTES_TOTAL = PREFIX + "kv_transfer_bytes_total"  # labels peer, transport
KV_TRANSFER_FAILURES_TOTAL = PREFIX + "kv_transfer_failures_total"  # label reason
KV_EXPIRED_BLOCKS_TOTAL = PREFIX + "kv_expired_blocks_total"
WEIGHTS_BYTES = PREFIX + "weights_bytes"

# Labels on every series of a router or worker.
LABEL_MODEL = "model"  # the object's name
LABEL_NAMESPACE = "namespace"
LABEL_SLO = "slo"
LABEL_ROLE = "role"
LABEL_POOL = "pool"
LABEL_MODE = "mode"
