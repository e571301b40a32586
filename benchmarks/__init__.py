"""
What is measured, and how. `bench.py` runs all but the scripts.

    train_step     time of a training iteration
    recipes        what a setting brings to training in equal seconds
    generate       tokens a second, with the cache and without
    memory         peak memory of generation
    loss           the cost of dropped context and rounded numbers, in nats
    caches         the caches of kvcache/ on the compiled step, in parts
    drafts         one text with drafts and without
    gpu            the engine and a step on a GPU
    peers/         the same weights in other engines: decoding, prefills, long contexts
    serve/         our server and llama-server under load, in parts
    experiments/   models that are trained with other positions, endless texts, recall; busy neighbours

    harness, shapes      how all of it is timed, printed, drawn and written; the models that are measured
    trained              models that train.py trains, each once
    old_and_new          a script: a commit or another work tree and this one, timed in turns
    timed_tree           what old_and_new runs in each of the two

results/ has the measured rows, figures/ the pictures of the documents and what draws those that show no measurement.
"""
