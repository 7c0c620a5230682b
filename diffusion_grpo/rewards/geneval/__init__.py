"""GenEval: are the objects there that the prompt asks for?"""
