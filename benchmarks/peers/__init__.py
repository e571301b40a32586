"""
The same weights in other engines: Hugging Face transformers, CTranslate2, llama.cpp and ONNX Runtime.

    pip install -r requirements-peers.txt
    python bench.py --mode=peers

    race            our ways to generate and the other engines, in turns: rows
    report          the table and the picture of these rows
    engine          what every engine has: weights, threads, generate
    ours            our ways to generate, as engines
    hugging_face, ctranslate, llamacpp, onnx_engine      one engine each
    onnx_graph      the graph that ONNX Runtime runs
"""
