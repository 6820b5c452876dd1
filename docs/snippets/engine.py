import jackfield

with jackfield.load(
    "demo",  # or a hub id, a folder, a live model
    attn_implementation="plugin:sdpa",
    cache_implementation="plugin:paged",
) as engine:
    for done in engine.generate(["Once upon a time", "One day Mia"], max_new_tokens=40):
        print(done.text)
    print(engine.report())  # what was observed to run, and how often
