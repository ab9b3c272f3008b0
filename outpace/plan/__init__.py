"""Planning before a launch: does it fit, which draft, how deep, what is lost. Arithmetic only, unless asked to measure.

`shapes.py`, `known_models.py` and `precision.py` describe models, `machines.py` accelerators and CPUs; `models.py` and
`drafts.py` open what the user named. `memory.py` divides the memory, `roofline.py` gives the costs of steps,
`guesses.py` the acceptance, and `speed.py` asks the policy's own planner for the best depth. `pairing.py` judges
drafts, `advice.py` says what to do, `planning.py` does all of it. `measure.py` and `agreement.py` alone run models.
"""
