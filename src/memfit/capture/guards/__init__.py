"""What a captured step depended on, looked at before it is used: frames captured by Dynamo, and a fingerprint for what Dynamo refuses."""
