"""Is it right? The answer is found by rule and compared by value; what leads to it is measured, not paid.

    answers.py    which part of a completion is its answer
    equality.py   whether two answers are the same number, tuple, interval or expression
    killable.py   a function in a process that can be killed, for what may hang or crash
    working.py    whether the equations before it are true: measured, never paid
    rewards.py    the first three together: a grader, and a user's own reward function
"""
