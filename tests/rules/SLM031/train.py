import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--mode", default="ddp")
args = parser.parse_args()
