"""Our server and llama-server as processes, many clients in one process, and `loads`, what is measured with them."""
