"""Planning before a launch: does it fit, which draft, how deep, what is lost. Arithmetic only, unless asked to measure.

`shapes.py` and `known_models.py` describe models, `machines.py` accelerators and CPUs. `memory.py` divides the memory,
`roofline.py` gives the costs of steps, `speed.py` asks the policy's own planner for the best depth, `pairing.py` judges
drafts, and `advice.py` says what to do. `measure.py` alone runs models.
"""
