"""
Models of other projects in, and ours out: folders in Hugging Face format (transformers, vLLM, TGI) and GGUF files
(llama.cpp and programs that are built on it).
"""
from formats.gguf_files import is_gguf, to_gguf
from formats.huggingface import to_huggingface
from formats.pretrained import from_pretrained
from formats.tokenizer_files import byte_pairs, check_vocabulary

__all__ = ['byte_pairs', 'check_vocabulary', 'from_pretrained', 'is_gguf', 'to_gguf', 'to_huggingface']
