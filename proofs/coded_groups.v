(* A row of coded attention as a whole: keys with exact scores, and groups of keys with codes of one kind each.
   Used in docs/soundness.md under "Coded attention". *)

Require Import Certk.sums Certk.total_variation Certk.exponential Certk.gram_certificate Certk.coded_weights Certk.centred_group.

(* The keys of one kind, bounds X and D of the errors of their codes, and upper bounds of the sums of their weights. *)
Record group (key : Type) := Group {
  members : list key;
  errors : R;
  error : R;
  upper : R;
  squared : R;
  largest : R
}.
Arguments members {key}. Arguments errors {key}. Arguments error {key}.
Arguments upper {key}. Arguments squared {key}. Arguments largest {key}.

(* The bounds of a group are those of its keys, with weights u and errors x. *)
Definition describes {key} (u x : key -> R) (g : group key) : Prop :=
  0 <= errors g /\ total (members g) (fun k => x k * x k) <= errors g * errors g /\
  0 <= error g /\ (forall k, In k (members g) -> Rabs (x k) <= error g) /\
  total (members g) u <= upper g /\ squares (members g) u <= squared g /\
  0 < largest g /\ (forall k, In k (members g) -> u k <= largest g).

Lemma total_groups {key : Type} (groups : list (group key)) f :
  total (flat_map members groups) f = total groups (fun g => total (members g) f).
Proof. induction groups as [|g rest IH]; [reflexivity|]. simpl. now rewrite total_app, IH. Qed.

Section Row.
Context {key : Type}.
Variable scored : list key.
Variable groups : list (group key).
Let keys := scored ++ flat_map members groups.
Variables u x r flushed : key -> R.
Variables rho F : R.

Hypothesis used : forall k, In k keys -> 0 <= u k.
Hypothesis exact : forall k, In k scored -> x k = 0.
Hypothesis described : forall g, In g groups -> describes u x g.
Hypothesis rounding : forall k, In k keys -> Rabs (r k) <= rho.
Hypothesis rho_nonneg : 0 <= rho.
Hypothesis lost : forall k, In k keys -> 0 <= flushed k.
Hypothesis lost_together : total keys flushed <= F.
Hypothesis some_used : 0 < total keys u.

Let U := total keys u.
Let w := real u x r flushed.

Definition Y := total groups (fun g => root (errors g) (error g) (upper g) (squared g)).
Definition G := total groups (fun g => curved (errors g) (error g) (upper g) (squared g) (largest g)).
Definition H used_sum :=
  total groups (fun g => centred (errors g) (error g) (upper g) (squared g) (largest g) used_sum).

(* A sum of what is 0 for exact scores. *)
Lemma over_groups f : (forall k, In k scored -> f k = 0) ->
  total keys f = total groups (fun g => total (members g) f).
Proof.
  intros E. unfold keys. rewrite total_app, total_groups, (total_ext scored f (fun _ => 0) E), total_zero. ring.
Qed.

Lemma member k g : In g groups -> In k (members g) -> In k keys.
Proof. intros I J. apply in_or_app. right. apply in_flat_map. eauto. Qed.

Lemma moved_first : total keys (fun k => u k * Rabs (x k)) <= Y.
Proof.
  rewrite over_groups by (intros k I; rewrite exact by easy; rewrite Rabs_R0; ring).
  apply total_le. intros g I. destruct (described g I) as (? & ? & ? & ? & ? & ? & ? & ?).
  apply root_bound; eauto using member.
Qed.

Lemma moved_beyond : total keys (fun k => u k * (exp (x k) - 1 - x k)) <= G.
Proof.
  rewrite over_groups by (intros k I; rewrite exact by easy; rewrite exp_0; ring).
  apply total_le. intros g I. destruct (described g I) as (? & ? & ? & ? & ? & ? & ? & ?).
  apply curved_bound; eauto using member. lra.
Qed.

Lemma moved_across U_high S : U <= U_high -> total keys (part S u) <= U / 2 ->
  total keys (fun k => crossing keys u S k * u k * Rabs (x k)) <= H U_high.
Proof.
  intros L B. rewrite over_groups by (intros k I; rewrite exact by easy; rewrite Rabs_R0; ring).
  apply total_le. intros g I. destruct (described g I) as (? & ? & ? & ? & ? & ? & ? & ?).
  assert (U0 : 0 < U) by exact some_used.
  assert (E : total keys (part S u) = total keys (part S u) / U * U) by (field; lra).
  assert (p0 : 0 <= total keys (part S u) / U).
  { apply Rmult_le_pos; [now apply part_nonneg | left; now apply Rinv_0_lt_compat]. }
  apply (centred_bound (members g) u x); eauto using member.
  - repeat split; lra.
  - fold U. split; [easy|]. apply Rmult_le_reg_r with U; [easy|]. rewrite <- E. lra.
  - fold U. apply Rle_trans with (total keys (part S u)).
    + unfold keys. rewrite total_app, total_groups.
      assert (0 <= total scored (part S u)) by (apply part_nonneg; intros; apply used, in_or_app; now left).
      pose proof (member_le groups (fun g => total (members g) (part S u)) g) as M. cbv beta in M.
      enough (total (members g) (part S u) <= total groups (fun g => total (members g) (part S u))) by lra.
      apply M; [|easy]. intros h J. apply part_nonneg. eauto using member.
    + rewrite E at 1. now apply Rmult_le_compat_l.
Qed.

(* Bounds of the sum of the real weights. *)
Theorem masses : exp (- rho) * (U - Y) <= total keys w <= exp rho * (U + Y + G) + F.
Proof.
  split; [apply masses_low with (rho := rho) | apply masses_high];
    auto using moved_first, moved_beyond.
Qed.

(* The plain and the centred bound of the total variation distance. *)
Theorem plain_distance U_low U_high : 0 < U_low <= U -> U <= U_high ->
  let K := exp rho * (Y + G) + (exp rho - 1) * U_high + F in
  let L := Rmin U_high (Y + (exp rho - 1) * U_high) in
  distance keys (share keys u) (share keys w) <= Rmax K L / (U_low + (Rmax K L - L)).
Proof.
  intros HL HU. apply plain_bound; auto using moved_first, moved_beyond.
Qed.

Theorem centred_distance U_high Z_low : U <= U_high -> 0 < Z_low <= exp (- rho) * (U - Y) ->
  distance keys (share keys u) (share keys w)
  <= (exp rho * (H U_high + G) + (exp rho - 1) * U_high + F) / Z_low.
Proof.
  intros HU HZ. pose proof masses. pose proof (exp_ge_line rho).
  eapply Rle_trans.
  - eapply (centred_row keys u x r flushed rho F G) with (H := H U_high) (Z_low := Z_low);
      auto using moved_beyond, moved_across. fold w. lra.
  - apply Rmult_le_compat_r; [left; apply Rinv_0_lt_compat; lra|].
    assert ((exp rho - 1) * U <= (exp rho - 1) * U_high) by (apply Rmult_le_compat_l; lra).
    fold U. lra.
Qed.
End Row.
