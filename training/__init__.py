"""What train.py wires together around the loss: the settings, the batch, the update, several ranks, the report.

    config.py        every setting, once, and the rules that make a bad run fail at once
    groups.py        the samples of one step, in groups; data order and dynamic sampling
    packing.py       sequences without padding, in micro-batches that fit the memory
    learner.py       rewards to AdamW: the update of the adapter
    distributed.py   several processes that train as one
    watch.py         when one of them dies, all end, with its reason
    report.py        the line, the logs and the curves
"""
