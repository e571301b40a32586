"""
The same weights in other engines: Hugging Face transformers, CTranslate2, llama.cpp and ONNX Runtime.

    pip install -r requirements-peers.txt
    python bench.py --mode=peers

    decoding        greedy tokens after a short prompt: a part
    prefill         the time to the first token after a long prompt: a part
    long_context    a step after a long prompt, with keys and values in fewer bits: a part
    race            our ways to generate and the other engines, in turns: rows
    report          the table and the picture of these rows
    engine          what every engine has: weights, threads, generate
    ours            our ways to generate, as engines
    hugging_face, ctranslate, llamacpp, onnx_engine      one engine each
    onnx_graph      the graph that ONNX Runtime runs
"""
from benchmarks.peers import decoding, long_context, prefill

PARTS = dict(decoding=decoding, prefill=prefill, long_context=long_context)  # as those of benchmarks/caches
