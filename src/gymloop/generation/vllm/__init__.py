"""vLLM behind the Engine protocol: everything that knows vLLM's names is in this package and in ``vllm_engine``."""
