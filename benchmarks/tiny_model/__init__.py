"""How the embedded model was made (`train.py`, `render.py`) and how good it is (`evaluate.py`)."""
