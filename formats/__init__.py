"""
Models of other projects in, and ours out: folders in Hugging Face format (transformers, vLLM, TGI) and GGUF files
(llama.cpp and programs that are built on it).

    hub               a model's name on the hub: where its folder is on this disk
    pretrained        reading a Hugging Face folder or a GGUF file
    families          what its config.json says, and what is refused
    from_gguf         reading a GGUF file: what is a config.json and weights there
    gguf_tokenizer    reading a GGUF file: what is a tokenizer.json there
    huggingface       writing a Hugging Face folder
    gguf_files        writing a GGUF file
    names             the names that other projects give to the weights
    weights           all heads and biases, where other projects need them
    tokenizer_files   tokenizers in the files of other projects
"""
from formats.gguf_files import to_gguf
from formats.huggingface import to_huggingface
from formats.pretrained import files_of, from_pretrained
from formats.tokenizer_files import check_vocabulary

__all__ = ['check_vocabulary', 'files_of', 'from_pretrained', 'to_gguf', 'to_huggingface']
