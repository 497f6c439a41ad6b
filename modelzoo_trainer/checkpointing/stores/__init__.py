"""Object stores: S3, Google Cloud Storage, Azure Blob Storage, and one in memory for tests.

    url = parse_url("s3://bucket/run")            # urls.py
    store = open_store(url, {"endpoint": "..."})  # store.py; needs the extra `cloud`
    store.probe()                                 # before the first step
    store.put("checkpoint_10/files/model.safetensors", path, xxh3_128=digest)
    store.create("checkpoint_10/manifest.json", text)  # False: another one is there
    data, tag = store.read(".lock")
    tag = store.replace(".lock", data, tag)       # raises ObjectChanged
    store.download(name, new_file, size_bytes, xxh3_128)
    store.list("checkpoint_10"), store.delete(names)
    lease = open_lease(url, options); lease.take()  # lease.py; check() before each upload

Names are relative to the prefix of the URL. Every call retries with back-off, ends within a time
limit, and raises a `StoreError` without secrets. Does not import torch.
"""
