"""Continue a text with an exported model, in transformers: `python generate_hf.py FOLDER TEXT`."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

folder, text = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
inputs = tokenizer(text, return_tensors="pt")
ids = model.generate(**inputs, max_new_tokens=40, do_sample=False)
print(tokenizer.decode(ids[0], skip_special_tokens=True))
