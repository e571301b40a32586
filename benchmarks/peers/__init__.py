"""
Other engines with the same weights, an adapter each (hugging_face, ctranslate, llamacpp, onnx); `engine` says what all
of them have, `race` measures them in turns with ours: pip install -r requirements-peers.txt
"""
