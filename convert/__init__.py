"""Checkpoints into models and back.

    loader.py      a name or folder becomes a model, quantised layer by layer on the way in
    merge.py       a model and its adapter become a 16-bit checkpoint that other programs load
    calibrate.py   an NVFP4 checkpoint with better scales than plain rounding gives
"""
