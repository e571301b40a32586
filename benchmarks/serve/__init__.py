"""
Our server and llama-server as processes (servers), many clients in one process (client), and what is measured with them
(loads): pip install -r requirements-serve.txt
"""
