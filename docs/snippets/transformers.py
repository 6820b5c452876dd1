from transformers import AutoModelForCausalLM

import jackfield

jackfield.install()
model = AutoModelForCausalLM.from_pretrained(
    "path/to/model",
    attn_implementation="plugin:sdpa",  # any installed attention, by its name
)
output = model.generate(
    model.dummy_inputs["input_ids"],
    past_key_values=jackfield.cache("plugin:dynamic", model),
    max_new_tokens=8,
)
print(jackfield.report(model))
