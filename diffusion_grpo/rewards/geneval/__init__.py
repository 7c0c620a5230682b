"""GenEval: whether an image shows the objects that its prompt asks for."""
