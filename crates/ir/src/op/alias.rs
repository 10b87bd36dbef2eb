//! Aliases: short names of workloads.

/// Aliases with their workload texts. The part before a `.` names a set of aliases.
pub const ALIASES: &[(&str, &str)] = &[
    ("matmul-256", "matmul:m=256,n=256,k=256"),
    ("matmul-512", "matmul:m=512,n=512,k=512"),
    ("matmul-1024", "matmul:m=1024,n=1024,k=1024"),
    ("matmul-2048", "matmul:m=2048,n=2048,k=2048"),
    ("bert.MM1", "matmul:m=512,n=1024,k=1024"),
    ("bert.MM2", "matmul:m=512,n=4096,k=1024"),
    ("bert.MM3", "matmul:m=512,n=1024,k=4096"),
    ("bert.BMM1", "batch_matmul:b=960,m=128,n=64,k=128"),
    ("bert.BMM2", "batch_matmul:b=960,m=128,n=64,k=128,ta=1"),
    ("bert.BMM3", "batch_matmul:b=960,m=128,n=128,k=64,tb=1"),
    ("resnet18.C1", "conv2d:c=3,h=224,w=224,k=64,r=7,s=7,stride=2,pad=3,const=w"),
    ("resnet18.C2", "conv2d:c=64,h=56,w=56,k=64,r=3,s=3,pad=1,const=w"),
    ("resnet18.C3", "conv2d:c=64,h=56,w=56,k=64,r=1,s=1,const=w"),
    ("resnet18.C4", "conv2d:c=64,h=56,w=56,k=128,r=3,s=3,stride=2,pad=1,const=w"),
    ("resnet18.C5", "conv2d:c=64,h=56,w=56,k=128,r=1,s=1,stride=2,const=w"),
    ("resnet18.C6", "conv2d:c=128,h=28,w=28,k=128,r=3,s=3,pad=1,const=w"),
    ("resnet18.C7", "conv2d:c=128,h=28,w=28,k=256,r=3,s=3,stride=2,pad=1,const=w"),
    ("resnet18.C8", "conv2d:c=128,h=28,w=28,k=256,r=1,s=1,stride=2,const=w"),
    ("resnet18.C9", "conv2d:c=256,h=14,w=14,k=256,r=3,s=3,pad=1,const=w"),
    ("resnet18.C10", "conv2d:c=256,h=14,w=14,k=512,r=3,s=3,stride=2,pad=1,const=w"),
    ("resnet18.C11", "conv2d:c=256,h=14,w=14,k=512,r=1,s=1,stride=2,const=w"),
    ("resnet18.C12", "conv2d:c=512,h=7,w=7,k=512,r=3,s=3,pad=1,const=w"),
    ("alexnet.C1", "conv2d:n=512,c=3,h=227,w=227,k=64,r=11,s=11,stride=4"),
    ("alexnet.C2", "conv2d:n=512,c=64,h=27,w=27,k=192,r=5,s=5,pad=2"),
    ("mobilenet.DW1", "depthwise_conv2d:c=32,h=112,w=112,r=3,s=3,pad=1,const=w"),
    ("mobilenet.DW2", "depthwise_conv2d:c=128,h=56,w=56,r=3,s=3,stride=2,pad=1,const=w"),
    ("mobilenet.DW3", "depthwise_conv2d:c=512,h=14,w=14,r=3,s=3,pad=1,const=w"),
];

/// Set to which an alias belongs.
pub(super) fn set_of(alias: &str) -> Option<&str> {
    alias.split_once('.').map(|(set, _)| set)
}

/// Names of the sets.
pub(super) fn sets() -> Vec<&'static str> {
    let mut sets: Vec<&str> = ALIASES.iter().filter_map(|(alias, _)| set_of(alias)).collect();
    sets.dedup();
    sets
}
