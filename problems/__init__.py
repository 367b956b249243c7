"""What is asked.

    sources.py     data sets as prompts with checkable answers
    templates.py   a model's chat template, rendered where it can do no harm
    tasks.py       the built-in task, data sets by name, and prompts as tokens
"""
