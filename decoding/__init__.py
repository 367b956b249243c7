"""What rollout.py drives: prompts in, one token after another out.

    attention.py      the KV cache, and attention of one new token a sequence against it
    prefill.py        prompts into the cache
    decode.py         one step, held entirely on the device
    graph_decode.py   the same step as one CUDA graph
    stops.py          stop strings that end a completion
"""
