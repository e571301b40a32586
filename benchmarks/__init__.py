"""
What is measured, and how. `bench.py` runs it.

    generate       tokens a second without a cache, with it, and as sample.py draws them
    train_step     time of a training iteration
    loss           what rounded numbers and a shifted context cost, in nats
    evaluation     how good a model is: bits per byte, multiple choice
    gpu            the engine and its step on a GPU
    peers/         the same weights in other engines: decoding and prefills
    serve/         our server and llama-server with several clients; a soak

    ours           how a benchmark makes and calls our own engine: the only file that imports it
    harness        how all of it is timed, printed and written
    shapes         the models that are measured

results/ has measured rows, figures/ pictures. docs/BENCHMARKS.md names the commit with the code of those without one.
"""
