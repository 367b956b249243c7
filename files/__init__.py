"""What lies on disk, read as untrusted input and written whole or not at all. Nothing here knows the model.

    hub.py          what a model folder says of itself: names, layout, end tokens, tokenizer
    layouts.py      the two layouts in which NVFP4 weights are stored
    shards.py       safetensors in and out, one tensor at a time; a float checkpoint turned into an NVFP4 one
    peft_files.py   LoRA adapters as peft writes and reads them
    checkpoint.py   a run's own state: atomic, verified on the way back, one writer a folder
"""
