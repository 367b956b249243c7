"""What the transformer of model.py is made of.

    shapes.py    the shape of a model, as its config.json says it
    rope.py      rotary positions: the tables and the rotation
    weights.py   one frozen matrix in 4 or 16 bits, behind one small interface
"""
